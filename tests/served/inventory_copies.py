"""The sandbox's hosts with another model, which v100-1 gets from the lab's mirror and every other host from v100-1 alone."""

import os
import runpy

_names, _data = runpy.run_path("inventories/sandbox.py")["sandbox"]
_model = {"model_id": "laoka/tiny-other", "model_revision": os.environ["LAOKA_TEST_REVISION"]}
_mirror = _data["model_source"].rsplit("/", 2)[0] + "/laoka/tiny-other"
_sources = {"v100-1": ("host:v100-1", _mirror)}

sandbox = (
    [(_name, {**_host, **_model, "model_source": _sources.get(_name, ("host:v100-1",))}) for _name, _host in _names],
    {key: value for key, value in _data.items() if key not in ("model_source", *_model)},
)
