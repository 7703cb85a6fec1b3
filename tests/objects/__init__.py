"""Object stores: the same properties on a folder and on S3."""
