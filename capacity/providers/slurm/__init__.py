"""Slurm: pilot jobs, one for each machine, whose batch script is the agent."""

from capacity.providers.slurm.provider import SlurmProvider as SlurmProvider
from capacity.providers.slurm.provider import open_provider as open_provider
from capacity.providers.slurm.settings import SlurmSettings as SettingsOf

__all__ = ["SettingsOf", "SlurmProvider", "open_provider"]
