"""A fleet that is bought for the peak against half of the demand and pools for the rest, on real traces."""
