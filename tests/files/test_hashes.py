"""Hashes that reports and answer folders store and that the wire carries: they never change."""

import pytest

from infer.info import ROOT
from moa_jax.files import client_files, model_folder

DEMO = ROOT / "moa_jax" / "demo"
STORED = {  # of the bundled models: of all their bytes (answer folders), of samples (the wire)
    "target": (
        "668166a7ba3ff92cb8001141a3342420fad87ca445ae59f05d5a9abc03ebd382",
        "5531478d18a3cfb34fac23029f4008d105f4642e47d8b7695ae5cce96ef92016",
    ),
    "draft": (
        "0e8b27b4efab978bcc0823b954224fca4facaa6eb7e7b8e8845df29a345bd917",
        "09e5146ca51f81805e9f959616003445dabac166fa0988a4042972bd89bfc9ac",
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_the_bundled_models_keep_their_hashes(name):
    folder = DEMO / name
    assert (model_folder.folder_hash(folder), client_files.model_hash(folder)) == STORED[name]
