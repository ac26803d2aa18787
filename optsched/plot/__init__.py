"""Figures: each function draws on the axes given, computes nothing and shows nothing."""
