"""When this machine is free to train: its owner's word, schedule, and whether somebody needs the machine."""
