"""Tests of object stores in folders, on S3 and on Google Cloud Storage."""
