"""Steering of a job: which hosts take part in it, and what is done about a verdict.

membership   who is in the job, as a pure state machine
orders       what can be done to a running job, as values
policy       from findings to orders, as a pure function
hosts        table of the hosts for a person or a program
"""
