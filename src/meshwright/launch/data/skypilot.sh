set -e
mkdir -p {folder}
cp -r ~/run-files/. {folder}
cd {workdir}
PET_NODE_RANK=$SKYPILOT_NODE_RANK
PET_MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
PET_MASTER_PORT={port}
export PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT
exec {torchrun}
