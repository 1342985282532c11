"""Measured times: profiles of machines, of training steps, and of single regions.

profile = graphshard.profiling.profile_step(model, (tokens, targets))
print(profile)
"""

from graphshard.cost.profile import Profile, load_profile
from graphshard.predict.profile_step import load_measured, measure_regions, metrics, profile_step, save_measured
from graphshard.predict.step_profile import StepProfile

__all__ = [
    "Profile",
    "StepProfile",
    "load_measured",
    "load_profile",
    "measure_regions",
    "metrics",
    "profile_step",
    "save_measured",
]
