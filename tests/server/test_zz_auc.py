import pytest
from tests.server.test_isolation import *
@pytest.mark.slow
def test_auc(make_real_server):
    with make_real_server("--api-key", "key-a", "--api-key", "key-b") as server:
        t = TestTiming()
        print("within", t.auc(server, KEY_A, 40, 1)); print("across", t.auc(server, KEY_B, 200, 2))
