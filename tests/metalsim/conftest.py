"""The simulator loads what it compiles as Linux does; on a Mac the kernels run on the GPU
itself."""

import sys

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]
