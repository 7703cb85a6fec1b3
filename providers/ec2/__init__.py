"""Amazon EC2: launches on-demand and spot instances whose user data starts the agent."""

from providers.ec2.provider import Ec2Provider as Ec2Provider
from providers.ec2.provider import open_provider as open_provider
from providers.ec2.settings import Ec2Settings as SettingsOf

__all__ = ["Ec2Provider", "SettingsOf", "open_provider"]
