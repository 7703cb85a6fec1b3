"""The exit statuses of `mizzen agent --once`, which say why it has ended. Providers read them from its job or pod."""

NOTICED = 0
"""The machine had notice that it would be reclaimed. All tasks have ended, and their output is stored."""
UNSTORED = 74
"""The machine had notice, and all tasks have ended, but some of their output could not be stored in time."""
RESTARTED = 75
"""Its job was started again by Slurm. It has served nothing: mizzen replaces instances itself."""
STOPPED = 76
"""The agent was stopped by SIGINT or SIGHUP, without notice, and has not waited for its tasks."""
SAID = {
    UNSTORED: "its agent has ended; output of its tasks could not be stored",
    RESTARTED: "Slurm started the job again after its node or partition took it back; mizzen requests another one",
    STOPPED: "its agent was stopped without notice",
}
