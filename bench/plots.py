"""How a plot is written."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


def save(figure: Figure, output: Path) -> None:
    """Writes an image whose ending names the format; the same figure gives the same file."""
    with mpl.rc_context({"svg.hashsalt": "jsg", "svg.fonttype": "none"}):
        figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)
