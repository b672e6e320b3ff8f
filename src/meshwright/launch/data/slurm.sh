step=
is_asked=no
# shellcheck disable=SC2317,SC2329 # the trap calls it
ask() {{ # the time limit comes near
  is_asked=yes
  [[ -z $step ]] || kill -USR1 "$step" # srun passes it on to every process
}}
trap ask USR1

{step}
step=$!
[[ $is_asked == no ]] || ask # while srun started

code=0
wait "$step" || code=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends the wait, not the step
  code=0
  wait "$step" || code=$?
done
trap '' USR1

requeue() {{
  # A job that was cancelled is no longer running, and stays so.
  if scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q 'JobState=RUNNING'; then
    echo "$1: queued again"
    scontrol requeue "$SLURM_JOB_ID"
  fi
}}

if [[ ${{SLURM_RESTART_COUNT:-0}} -eq 0 ]]; then rm -f {failures}; fi # of an earlier job
failures=$(cat {failures} 2>/dev/null || echo 0)
if [[ $code -eq 0 ]]; then
  echo "done"
elif [[ $code -eq {stopped_code} || ($is_asked == yes && $code -gt 128) ]]; then
  {stopped}
elif [[ $code -eq 2 || $code -eq 3 ]]; then
  echo "exit code $code: starting again would not help"
elif [[ $failures -lt {most} ]]; then
  echo $((failures + 1)) >{failures}
  requeue "exit code $code, failure $((failures + 1)) of {most} that are allowed"
else
  echo "exit code $code, and no restart is left"
fi
exit "$code"
