#!/usr/bin/env bash
# A Slurm of four nodes on this machine, for the recipe of Slurm. It needs root and Debian's slurmctld, slurmd, slurm-client and munge.
#
#   evidence/one_machine_slurm.sh FOLDER COMMAND...      (runs COMMAND with SLURM_CONF, then ends the daemons)
#
#   UNICKPT_FULL_MATRIX=1 evidence/one_machine_slurm.sh /tmp/slurm pytest -n0 tests/integration/recipes -k slurm
set -euo pipefail
mkdir -p "$1"
here=$(cd "$1" && pwd)
shift
mkdir -p "$here"/{state,spool,log,munge}
chmod 755 "$here" "$here/munge"
export SLURM_CONF=$here/slurm.conf
cat >"$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$here/munge/socket
CredType=cred/munge
StateSaveLocation=$here/state
SlurmdSpoolDir=$here/spool/%n
SlurmctldPidFile=$here/ctld.pid
SlurmdPidFile=$here/%n.pid
SlurmctldLogFile=$here/log/ctld
SlurmdLogFile=$here/log/%n
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=node[0-3] NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=[16820-16823] CPUs=1 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE
CONF
names="127.0.0.1 node0 node1 node2 node3 # $here"
grep -qF "$names" /etc/hosts || echo "$names" >>/etc/hosts # the endpoint is the name of a node
end() {
  scontrol shutdown || true
  pkill -9 -f "^slurmd -N node[0-3] -f $SLURM_CONF" || true # those of nodes that are down do not hear it
  [ ! -f "$here/munge/pid" ] || kill "$(cat "$here/munge/pid")"
  sed "\|# $here\$|d" /etc/hosts >"$here/hosts" && cat "$here/hosts" >/etc/hosts
}
trap end EXIT
[ -f "$here/munge/key" ] || (umask 377 && head -c 1024 /dev/urandom >"$here/munge/key")
munged --force --key-file="$here/munge/key" --socket="$here/munge/socket" --pid-file="$here/munge/pid" \
  --log-file="$here/munge/log" --seed-file="$here/munge/seed"
slurmctld -c -f "$SLURM_CONF"
for node in node0 node1 node2 node3; do slurmd -N "$node" -f "$SLURM_CONF"; done
until [ "$(sinfo --noheader --states=idle --format %D)" = 4 ]; do sleep 1; done
"$@"
