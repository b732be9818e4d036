"""Distillation as pure steps, and what a run keeps: checkpoints, metrics, fingerprints."""
