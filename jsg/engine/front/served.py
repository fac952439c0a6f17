"""The engine of a server, which is one process (`client.py`) or several (`fleet.py`). Both have the same methods."""

from jsg.engine.front.client import EngineClient
from jsg.engine.front.fleet import EngineFleet

ServedEngine = EngineClient | EngineFleet
