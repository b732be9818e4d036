"""The target of `configs/controls.py`: the bundled one's recipe on 4.5 times the tokens.

    python -m train.pretrain --config configs/dialogues_target.py
    cp -r runs/dialogues_target/final/* configs/targets/dialogues

configs/targets/dialogues/README.md has what came of it.
"""

import dataclasses

from configs import demo_target

config = dataclasses.replace(
    demo_target.config,
    optim=dataclasses.replace(demo_target.config.optim, decay_steps=2600, total_steps=2700),
    run=dataclasses.replace(demo_target.config.run, directory="runs/dialogues_target"),
    output="runs/dialogues_target/final",
)
