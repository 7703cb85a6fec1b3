"""A simulated cloud on this computer, for the embedded stack, for trials and for tests. Its machines are real agents.

Capacity follows traces, and the cloud has prices, start delays and interruption notices. The state is a folder of the
installation (`capacity.providers.trace.cloud`): the provider writes the launched machines into it, and the process that
runs the stack's agents starts and stops them accordingly.
"""

from capacity.providers.trace.provider import TraceProvider as TraceProvider
from capacity.providers.trace.provider import open_clouds as open_clouds
from capacity.providers.trace.provider import open_provider as open_provider
from capacity.providers.trace.settings import TraceProviderSettings as SettingsOf

__all__ = ["SettingsOf", "TraceProvider", "open_clouds", "open_provider"]
