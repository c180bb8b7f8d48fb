import sys

import pytest

from twostroke.config import EngineConfig, resolve
from twostroke.errors import ConfigError
from twostroke.proc.ray_engines import RayEngines, engine_config

SETTINGS = {
    "ray": "10.0.0.1:6379",
    "engines_listen": "0.0.0.0:8100",
    "key": "k",
    "prefill": 1,
    "decode": 2,
    "max_num_seqs": 3,
}


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    config, _ = resolve(SETTINGS, environ={})
    with pytest.raises(ConfigError, match=r"Ray is not installed; pip install 'twostroke\[ray\]'"):
        RayEngines(config)


def test_an_engine_gets_the_servers_settings_and_its_own_role():
    config, _ = resolve(SETTINGS, environ={})
    assert config.local_roles == ()
    assert config.roles == ("prefill", "decode", "decode")
    engine = engine_config(config, "10.0.0.2:8100", "decode")
    assert engine == EngineConfig(
        join="10.0.0.2:8100", role="decode", max_num_seqs=3, kv_transport="nixl"
    )
    assert engine.local_roles == ("decode",)
    assert engine.hands_off
