# What the type checker reads in place of transformers. For one name of that package it would read two thousand files.
from typing import Any

def __getattr__(name: str) -> Any: ...
