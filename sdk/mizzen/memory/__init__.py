"""The memory tier of checkpoints: parts in the memory of this machine and of a peer machine.

A memory server is a process of its own, one for each user and run on a machine. It outlives the training, and ends when
it was not used for some time, or is killed; its content is lost then. `server` is this process, `wire` its protocol,
`connection` connects to servers, and `memory_store` is the object store whose parts they hold.
"""
