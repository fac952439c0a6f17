"""Writes plots to files."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


def save(figure: Figure, output: Path) -> None:
    """Writes an image in the format that the file's ending names. The same figure always gives the same file."""
    with mpl.rc_context({"svg.hashsalt": "jsg", "svg.fonttype": "none"}):
        figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)
