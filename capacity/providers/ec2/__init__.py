"""Amazon EC2: launches on-demand and spot instances whose user data starts the agent."""

from capacity.providers.ec2.provider import Ec2Provider as Ec2Provider
from capacity.providers.ec2.provider import open_provider as open_provider
from capacity.providers.ec2.settings import Ec2Settings as SettingsOf

__all__ = ["Ec2Provider", "SettingsOf", "open_provider"]
