"""An exchange of a group: every member averages one shard, and sends the mean to the others."""
