"""Steering: a rendezvous backend for torchrun whose hosts can leave, return, wait as spares, and be parked.

scores       whether what a host has measured is good enough
limits       rules of a job
gains        what the job would gain without slow ranks, asked rarely from a function given from outside
membership   who is in the job: state, events, and questions about a state
quorum       which hosts may go on after a network failure
transitions  the next state, as a pure function of a state and an event
admission    when a running round takes more hosts in
link_verdicts  which end of a bad link is at fault, as a pure function
orders       what can be done to a running job, as values
policy       from findings to orders, as a pure function
reports      findings about the running round, as values
hosts        table of the hosts for a person or a program
history      what happened to a job, as entries made from its states
timeline     rounds, downtime by cause and effective training time of a history
outbox       bounded queue and thread for work that must never delay steering
chronicle    an agent's history, and its file
metrics      values for Prometheus
webhook      alerts to a web server
observers    what an agent tells of the events of its job
codec        states and messages as JSON, authenticated
decisions    the leader applies the policy to reports
local_copy   an agent's copy of the state, and the leader's own
probing      requests to other agents
link_speed   measurement of the link to another agent
link_check   the leader orders hosts to measure their links
listening    connections that other agents open
answers      answers to their requests
asking       what the command line asks
peer         an agent's part in the membership
watcher      diagnosis agent of the host, a process of its own
host_agent   its start, its assignments and its reports
workers      worker processes that SIGTERM may not end
self_measure what a host measures, a process of its own
self_check   a host measures itself, and reports the result
round_store  store that the agents use in one round
rendezvous   handler that torchrun finds under ``--rdzv-backend unickpt``
"""
