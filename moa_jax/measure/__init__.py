"""Measurements that alternate.

turns.py        several ways to do the same work, measured side by side
"""
