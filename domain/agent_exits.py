"""The exit statuses of `mizzen agent --once`, which say why it has ended. Providers read them from its job or pod."""

NOTICED = 0
"""It had notice. All of its tasks have ended, and their output is stored."""
UNSTORED = 74
"""It had notice, and all of its tasks have ended, but output of them could not be stored in time."""
RESTARTED = 75
"""Its job was started again by Slurm. It has served nothing: mizzen replaces instances itself."""
STOPPED = 76
"""It was stopped without notice (SIGINT, SIGHUP), and has not waited for its tasks."""
SAID = {
    UNSTORED: "its agent has ended; output of its tasks could not be stored",
    RESTARTED: "Slurm started the job again after its node or partition took it back; mizzen requests another one",
    STOPPED: "its agent was stopped without notice",
}
