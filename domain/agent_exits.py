"""The exit statuses of `mizzen agent --once`, which say why it has ended. Providers read them from its job or pod."""

NOTICED = 0
"""The machine had notice that it would be reclaimed. All tasks have ended, and their output is stored."""
UNSTORED = 74
"""The machine had notice, and all tasks have ended, but some of their output could not be stored in time."""
RESTARTED = 75
"""Its job was started again by Slurm. It has served nothing: mizzen replaces instances itself."""
STOPPED = 76
"""The agent was stopped by SIGINT or SIGHUP, without notice, and has not waited for its tasks."""
NO_SECRETS = 77
"""The job of a pilot found no secrets, so its agent was not started."""
NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""The shell could not start a command: these are its own statuses."""
SAID = {
    UNSTORED: "its agent has ended; output of its tasks could not be stored",
    RESTARTED: "Slurm started the job again after its node or partition took it back; mizzen requests another one",
    STOPPED: "its agent was stopped without notice",
    NO_SECRETS: "its node sees no secrets of it in the provider's folder: nodes do not share this folder, or another "
    "job of the instance took them",
    NOT_EXECUTABLE: "the program of its agent cannot be executed there (exit status 126)",
    NOT_FOUND: "the program of its agent, or one of `prepare`, is not there (exit status 127)",
}
