"""A fleet of two X99 hosts, to copy: `cp inventories/example.py inventories/lab.py`, edit, then

    pyinfra inventories/lab.py deploys/check.py        # changes nothing
    pyinfra inventories/lab.py deploys/full.py --dry   # what would change

A list (or a tuple of a list and data) at the top level is a group. A host's own data wins over its group's, and that over
inventories/group_data/all.py. Addresses and names of example.net are examples: put yours. A line without its # takes effect.
A key that laoka does not know stops the run before anything changes, with file and line. docs/inventory.md lists every key.
"""

from pathlib import Path as _Path

_HERE = _Path(__file__).parent

gpu_hosts = (
    [
        # An MSI X99A in a tower: two V100 PCIe 32 GB, passive cards behind shroud fans.
        (
            "x99-tower",
            {
                "ssh_hostname": "192.168.7.21",
                # What must be there. Find the addresses with `lspci -D -nn -d 10de:`; a card that is missing later is an
                # incident, and a card that is missing now stops the deploy. "slot" is what the alert calls it.
                "expected_gpus": [
                    {"bdf": "0000:03:00.0", "device_id": "10de:1db6", "slot": "upper slot"},
                    {"bdf": "0000:04:00.0", "device_id": "10de:1db6", "slot": "lower slot"},
                ],
                # 175 W instead of 250 W kept a shroud-cooled card's memory below its 85 C limit at about 91 % of the
                # decode speed (reported by one owner of this very board).
                "power_limit_w": 175,
            },
        ),
        # An ASRock X99 Taichi: two V100 SXM2 16 GB on SXM2-to-PCIe adapters. NVLink is not wired there: no NVLink is normal.
        (
            "x99-sxm2",
            {
                "ssh_hostname": "192.168.7.22",
                "expected_gpus": [
                    {"bdf": "0000:05:00.0", "device_id": "10de:1db1", "slot": "adapter 1", "serial": "0320318012345"},
                    {"bdf": "0000:06:00.0", "device_id": "10de:1db1", "slot": "adapter 2"},
                ],
                "power_limit_w": 200,
                # Two 16 GB cards hold the 27B model with a short context only.
                "serve_flags": {"max-model-len": 32768, "max-num-seqs": 1, "tensor-parallel-size": 2},
            },
        ),
    ],
    {
        # --- how to get there ---
        "ssh_user": "ops",
        "ssh_key": "~/.ssh/id_ed25519",
        "_sudo": True,
        # Behind a jump host: an ordinary ssh_config with ProxyJump. Leave the line out when the hosts are reached directly.
        # "ssh_config_file": str(_HERE / "example_ssh_config"),
        # --- a slow or closed network ---
        # A proxy for apt and pip on the hosts, and what is reached without it.
        # "http_proxy": "http://192.168.7.2:3128",
        # "no_proxy": "127.0.0.1,localhost,192.168.7.0/24",
        # A mirror of the Python package index near you.
        # "pip_index_url": "https://pip-mirror.example.net/simple",
        # More apt sources, by file name: a local mirror or a USB disk with .debs.
        # "apt_keyrings": {"mirror.gpg": "keys/mirror.gpg"},
        # "apt_sources": {"mirror": "deb [signed-by=/usr/share/keyrings/laoka-mirror.gpg] https://apt.example.net noble main"},
        # --- what is pinned ---
        # For `laoka lock inventories/lab.py`: which stack these cards can run on this system, and whether it fits.
        "os_release": "ubuntu-24.04",
        # 580 is the last driver branch that drives a V100.
        "driver_branch": "580",
        # None pins the kernel that runs now; or name one, such as "6.8.0-124-generic".
        "kernel": None,
        # A driver or kernel change reboots a host only when it has to, and then only with -y (--yes); "allowed" needs no -y.
        "reboot": "ask",
        # CUDA 12.8 is what 1Cat-vLLM 1.5.1 compiles its last kernels with; CUDA 13 does not know a V100.
        "cuda_toolkit": "12-8",
        # The V100's engine; leave both lines out to have the lock's, or the best that the cards allow. A release that is newer than
        # laoka's catalogue works by name once `laoka lock` has its hash from the release's own SHA256SUMS.
        "engine_name": "1cat-vllm",
        "engine_version": "1.5.1",
        # Where its wheel is near you: a folder of the hosts (kept full, it needs no network), or a web folder with the wheel and
        # SHA256SUMS. After them the release itself is asked.
        # "engine_wheelhouse": "/srv/wheels",
        # "engine_mirror": "http://192.168.7.2/wheels",
        "speculative": "auto",
        # --- the model ---
        # A revision is pinned by the hub's whole commit; `laoka model fetch NAME --revision main --dry` tells it. Sources are tried
        # in order; a folder or a web server of your own works too: `laoka model manifest FOLDER` prints the revision to pin then.
        "model_id": "QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4",
        "model_revision": "0" * 40,  # replace it: this one matches nothing
        "model_source": ["http://192.168.7.2/models/Qwen3.8-27B-QUASAR-NVFP4", "hf-mirror", "modelscope", "hf"],
        "served_model_name": "qwen3.8-27b",
        "serve_flags": {"max-model-len": 65536, "max-num-seqs": 2, "tensor-parallel-size": 2},
        # Where clients connect, and who may: `NAME KEY` a line (openssl rand -hex 24 makes a key). Hosts get hashes of them.
        "gateway_listen": "0.0.0.0:8080",
        "gateway_keys_file": str(_HERE / "secrets" / "gateway-keys"),
        # --- who is told ---
        # One address a line in apprise's form (WeCom, DingTalk, Feishu, Bark, ServerChan, Telegram, ntfy, mail, ...).
        # The file stays on your machine and on the hosts (root only); keep it out of the repository.
        "alert_urls_file": str(_HERE / "secrets" / "alert-urls"),
        # What the hosts say in alerts and logs: "en" or "zh".
        # "lang": "zh",
    },
)
