"""The flat top-level packages belong to podstream alone: a stranger of the same name must not creep in."""

from importlib.metadata import packages_distributions

import pytest


@pytest.mark.parametrize("package", ["model", "sharding", "kv", "serving", "tpu_configs", "podstream"])
def test_each_package_has_one_owner(package):
    assert set(packages_distributions()[package]) == {"podstream"}
