#!/bin/sh
# {title}
# On every node: sh start.sh NODE, with the number of the node from 0.
set -u
MODEL=${{MODEL{model}}}
NODE=${{1:-0}}
HERE=$(cd "$(dirname "$0")" && pwd)
servers=

serve() {{ # NODE DEVICES PORT RANK HEAD MORE...
  [ "$1" = "$NODE" ] || return 0
  DEVICES=$2 PORT=$3 RANK=$4{head}
  shift 5
  {devices}{command} "$@" > "server-$NODE-$PORT.log" 2>&1 &
  servers="$servers $!"
}}

{starts}
[ -n "$servers" ] || {{ echo "no server is for node $NODE" >&2; exit 2; }}
trap 'kill $servers' INT TERM
status=0
for server in $servers; do wait "$server" || status=$?; done
exit $status
