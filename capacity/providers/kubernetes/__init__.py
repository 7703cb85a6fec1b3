"""Kubernetes: pods, one for each machine, whose container is the agent."""

from capacity.providers.kubernetes.provider import KubernetesProvider as KubernetesProvider
from capacity.providers.kubernetes.provider import open_provider as open_provider
from capacity.providers.kubernetes.settings import KubernetesSettings as SettingsOf

__all__ = ["KubernetesProvider", "SettingsOf", "open_provider"]
