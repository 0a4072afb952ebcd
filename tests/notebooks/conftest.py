"""Makes `notebook_cells`, which the tests of this folder share, importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
