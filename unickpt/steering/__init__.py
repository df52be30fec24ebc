"""Steering: a rendezvous backend for torchrun whose hosts can leave, return, wait as spares, and be parked.

membership   who is in the job, as a pure state machine
orders       what can be done to a running job, as values
policy       from findings to orders, as a pure function
hosts        table of the hosts for a person or a program
codec        states and messages as JSON, authenticated
peer         connections between the agents, one of which leads
workers      worker processes that are stopped
round_store  store that the agents use in one round
rendezvous   handler that torchrun finds under ``--rdzv-backend unickpt``
"""
