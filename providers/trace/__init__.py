"""A cloud on this computer: capacity that follows traces, prices, delays, notices. Its machines are real agents.

It is for the embedded stack, for trials and for tests. The cloud is a folder of the installation
(`providers.trace.cloud`): the provider writes what is launched there, and the process that runs the stack's agents
starts and stops them by it.
"""

from providers.trace.provider import TraceProvider as TraceProvider
from providers.trace.provider import open_clouds as open_clouds
from providers.trace.provider import open_provider as open_provider
from providers.trace.settings import TraceSettings as SettingsOf

__all__ = ["SettingsOf", "TraceProvider", "open_clouds", "open_provider"]
