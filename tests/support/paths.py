"""Where things are in the checkout that the tests belong to."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
CSRC = ROOT / "csrc"
EXAMPLES = ROOT / "examples"
