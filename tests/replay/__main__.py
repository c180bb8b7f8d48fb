import sys
from pathlib import Path

import tests.replay

if len(sys.argv) != 3:
    sys.exit(tests.replay.__doc__)
sys.exit(tests.replay.main(Path(sys.argv[1]), Path(sys.argv[2])))
