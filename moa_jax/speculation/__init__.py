"""The choice of a draft shape for the next rounds, and what the choice rests on.

controller.py   the choice           cost_table.py   milliseconds of a round per draft shape
acceptance.py   acceptance rates     calibrate.py    timing of the rounds that a table lacks
"""
