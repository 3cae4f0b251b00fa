import pytest

# Of a test that asks the simulator for bytes or findings: it does not run on a GPU.
counted = pytest.mark.parametrize("device", ["simulator"], indirect=True)
