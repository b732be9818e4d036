"""Prints the facts of a bug report: versions, devices, caches, the pair and the data folders.

--families lists what loads instead: families of targets, RoPE scalings, weight formats, drafters.
"""

from __future__ import annotations

import json
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from infer.bench.tables import table_of
from infer.cli import compile_cache
from infer.cli.flags.pair import DEMO, MODEL, add_pair_flag
from infer.cli.program import Parser, run
from moa_jax.data.sources import locate
from moa_jax.errors import InputError
from moa_jax.files.hf_config import towers_of
from moa_jax.files.model_folder import find_folder
from moa_jax.files.whole_files import read_json
from moa_jax.version import __version__

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
MODEL_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
ROOT = Path(__file__).resolve().parents[1]


def golden_folder() -> Path | None:
    """The cases recorded from the authors' code: $MOA_GOLDENS, else ../shared/golden, or None."""
    folder = Path(os.environ.get("MOA_GOLDENS") or ROOT.parent / "shared" / "golden")
    return folder if folder.is_dir() else None


def data_folder() -> Path | None:
    """The data for training and measurements: $MOA_DATA, else ../shared/data, or None."""
    try:
        return locate("data:")
    except InputError:
        return None


def collect(
    target: Path = DEMO / "target", draft: Path | None = DEMO / "draft", load: bool = False
) -> dict[str, Any]:
    """The whole report as a JSON-ready dictionary; missing values are None.

    `load` also loads the target. Raises InputError for a given folder without a readable
    config.json, and for a target that cannot be loaded.
    """
    ours = {"moa-jax": __version__, "python": platform.python_version()}
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "versions": ours | {name: metadata.version(name) for name in PACKAGES},
        "host": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "memory_bytes": pages,
        },
        **_devices(),
        "folders": (folders := _folders()),
        "compile_cache": _compile_cache(folders["compile_cache"]),
        "pair": {"target": _model(target), "draft": draft and _model(draft)},
        "loading": _loading(target) if load else None,
    }


def loadable() -> dict[str, Any]:
    """All that loads, as a JSON-ready dictionary, from the registries that loading uses."""
    from moa_jax.drafters import DRAFTERS
    from moa_jax.files.families import FAMILIES
    from moa_jax.files.hf_config import SCALINGS, WINDOWED
    from moa_jax.files.prequantized import READ
    from moa_jax.model.quantize import FORMATS

    families = [
        {
            "family": family,
            "model_types": [family, *files.wrappers],
            "parity": f"transformers {files.architecture}",
            "gguf": list(files.gguf),
            "sliding_windows": family in WINDOWED,
        }
        for family, files in FAMILIES.items()
    ]
    return {
        "families": families,
        "rope_scalings": list(SCALINGS),
        "weights": list(FORMATS),
        "stored": list(READ),
        "drafters": list(DRAFTERS),
    }


def render_loadable(found: dict[str, Any]) -> str:
    """`loadable` as a table with one row per family, and one line per other list."""
    listed = lambda key: lambda row: ", ".join(row[key]) or None
    columns = {
        "family": "family",
        "model_type of config.json": listed("model_types"),
        "parity in float32": "parity",
        "GGUF architecture": listed("gguf"),
        "windows": lambda row: "yes" if row["sliding_windows"] else None,
    }
    lines = [table_of(found["families"], columns), ""]
    for key, name in (
        ("rope_scalings", "RoPE scalings"),
        ("weights", "--weights"),
        ("stored", "folders in eight bits"),
        ("drafters", "drafters"),
    ):
        lines.append(f"{name}: {', '.join(found[key])}")
    return "\n".join(lines)


def _devices() -> dict[str, Any]:
    """The devices that jax finds, or the error with which jax finds none."""
    import jax

    from moa_jax.pretrained import formats_of

    try:
        devices = jax.devices()
    except RuntimeError as error:
        return {"devices": [], "device_error": " ".join(str(error).split())}
    # A CPU device has no memory statistics: its memory is the host's.
    stats = [device.memory_stats() or {} for device in devices]
    found = [
        {
            "name": str(device),
            "kind": device.device_kind,
            "weights": formats_of(device),
            "memory_bytes": stat.get("bytes_limit"),
            "memory_used_bytes": stat.get("bytes_in_use"),
        }
        for device, stat in zip(devices, stats, strict=True)
    ]
    return {"devices": found, "device_error": None}


def _folders() -> dict[str, str | None]:
    import jax
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = {
        "compile_cache": jax.config.jax_enable_compilation_cache
        and jax.config.jax_compilation_cache_dir,
        "hub_cache": HF_HUB_CACHE,
        "goldens": golden_folder(),
        "data": data_folder(),
    }
    return {name: str(folder) if folder else None for name, folder in folders.items()}


def _compile_cache(folder: str | None) -> dict[str, int | None] | None:
    """Size and size limit of the compilation cache in bytes; None without a cache."""
    import jax

    if folder is None:
        return None
    most = jax.config.jax_compilation_cache_max_size
    return {
        "bytes": compile_cache.num_bytes(Path(folder)),
        "max_bytes": most if most >= 0 else None,
    }


def _model(folder: Path) -> dict[str, Any]:
    """A model's folder, the bytes of its weights, and the sizes and towers in its config.json."""
    if folder.parent == DEMO and not folder.is_dir():
        return {"folder": str(folder), "found": False}
    folder = find_folder(folder)
    config = read_json(folder / "config.json")
    weights = (path for kind in ("*.safetensors", "*.gguf") for path in folder.glob(kind))
    size = sum(path.stat().st_size for path in weights)
    text = (config.get("text_config") or {}) | config
    fields = {name: text[name] for name in MODEL_FIELDS if name in text}
    fields |= {"not_read": towers} if (towers := towers_of(config)) else {}
    return {"folder": str(folder), "found": True, "weights_bytes": size} | fields


def _loading(folder: Path) -> dict[str, Any]:
    """Times the loading of a target from its files to the device, in the default dtype.

    `bytes_per_s` counts bytes of the files. The first load after a reboot reads the disk.
    """
    import jax

    from moa_jax.pretrained import load_target

    jax.devices()  # starts the backend, which the time excludes
    start = time.perf_counter()
    target = jax.block_until_ready(load_target(folder).params)
    seconds = time.perf_counter() - start
    size = _model(folder)["weights_bytes"]
    dtype = target["embed"].dtype.name
    return {"seconds": seconds, "bytes_per_s": size / seconds, "dtype": dtype}


def render(report: dict[str, Any]) -> str:
    """The report as text, one fact per line."""
    host, folders = report["host"], report["folders"]
    rows = list(report["versions"].items())
    rows += [("host", f"{host['system']}, {host['cores']} cores, {_gib(host['memory_bytes'])}")]
    rows += [("device", _device_line(device)) for device in report["devices"]]
    if report["device_error"]:
        rows += [("device", f"none: {report['device_error']}")]
    rows += [
        ("compile cache", _cache_line(folders["compile_cache"], report["compile_cache"])),
        ("hub cache", folders["hub_cache"]),
        ("goldens", folders["goldens"] or "none: set MOA_GOLDENS"),
        ("data", folders["data"] or "none: set MOA_DATA"),
    ]
    rows += [(name, _model_line(model)) for name, model in report["pair"].items() if model]
    if loading := report["loading"]:
        rate = f"{loading['bytes_per_s'] / 1e9:.2f} GB/s"
        rows += [("loading", f"{loading['seconds']:.2f} s to {loading['dtype']}, {rate}")]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {fact}" for name, fact in rows)


def _cache_line(folder: str | None, size: dict[str, int | None] | None) -> str:
    if size is None:
        return f"off: set {compile_cache.FOLDER} to a folder, or unset it for the default one"
    most = "no bound" if size["max_bytes"] is None else f"at most {_gib(size['max_bytes'])}"
    return f"{folder}, {_mib(size['bytes'])}, {most}; {compile_cache.FOLDER}= turns it off"


def _device_line(device: dict[str, Any]) -> str:
    memory = "memory of the host"
    if device["memory_bytes"] is not None:
        used, whole = _gib(device["memory_used_bytes"]), _gib(device["memory_bytes"])
        memory = f"{used} of {whole} in use"
    formats = " or ".join(device["weights"])
    return f"{device['name']}, {device['kind']}, {memory}, --weights {formats}"


def _model_line(model: dict[str, Any]) -> str:
    if not model["found"]:
        return f"absent: no folder {model['folder']}"
    fields = [f"{name} {model[name]}" for name in MODEL_FIELDS if name in model]
    fields += [f"{tower} not read" for tower in model.get("not_read", ())]
    return ", ".join([model["folder"], _mib(model["weights_bytes"]), *fields])


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("infer.info", __doc__)
    pair = parser.add_argument_group("pair")
    add_pair_flag(parser, pair)
    pair.add_argument("--target", metavar=MODEL, help="default: the bundled target")
    pair.add_argument("--draft", metavar="DIR", help="default: the bundled drafter")
    pair.add_argument(
        "--load", action="store_true", help="load the target too, and print the loading speed"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--families", action="store_true", help="list the models that load, and nothing else"
    )
    output.add_argument("--json", action="store_true", help="print one JSON document")
    flags = parser.parse_args(arguments)
    if flags.families:
        found = loadable()
        print(json.dumps(found, indent=2) if flags.json else render_loadable(found))
        return
    draft = flags.draft or (None if flags.target else DEMO / "draft")
    report = collect(Path(flags.target or DEMO / "target"), draft and Path(draft), flags.load)
    print(json.dumps(report, indent=2) if flags.json else render(report))


if __name__ == "__main__":
    run(main)
