"""Geometry, Fig. 3, S3 to S5, Table 1: what the authors published of their own training runs."""
