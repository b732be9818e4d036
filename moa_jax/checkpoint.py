"""Training checkpoints through Orbax: state and config, never the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from moa_jax.config import RunConfig
from moa_jax.errors import InputError
from moa_jax.training import TrainState


class Checkpoints:
    """The checkpoints of one run directory; a save is complete or absent, never half."""

    def __init__(self, run: RunConfig, config: dict[str, Any]) -> None:
        """`config` describes the run; it is stored and compared on resume."""
        self._config = json.loads(json.dumps(config))  # as it will come back: lists, not tuples
        options = ocp.CheckpointManagerOptions(
            max_to_keep=run.keep_checkpoints, enable_async_checkpointing=True
        )
        folder = Path(run.directory).absolute() / "checkpoints"
        self._manager = ocp.CheckpointManager(folder, options=options)

    def restore(self, state: TrainState) -> TrainState | None:
        """The newest saved state with the shapes and shardings of `state`; None if there is none.

        Raises InputError when the directory holds a run with another config.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
        self._check_config(meta["meta"]["config"])
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        found = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        )
        return found["state"]

    def save(self, state: TrainState) -> None:
        """Saves in the background; a step that is already there is left alone."""
        step = int(state.step)
        if step == self._manager.latest_step():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave({"config": self._config})
        )
        self._manager.save(step, args=args)

    def close(self) -> None:
        """Waits for saves under way."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _check_config(self, saved: dict[str, Any]) -> None:
        changed = [name for name in self._config if self._config[name] != saved.get(name)]
        if changed:
            raise InputError(
                f"{self._manager.directory}: holds a run whose {', '.join(changed)} differ: "
                "restore the config or name another run.directory"
            )
