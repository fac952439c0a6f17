"""The last step of building: what begins each rule, classes of bytes, and everything as flat arrays."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jsg.constrained.limits import Limits, check
from jsg.constrained.tables import BYTE, CALL, LOOP, StaticTables
from jsg.errors import GrammarError

if TYPE_CHECKING:
    from jsg.constrained.builder import Parts, Positions
