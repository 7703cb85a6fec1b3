"""Where machines come from: offers, pools, what a provider of machines can do, and what follows for a pool. Pure.

The life of one machine that was asked for (an instance) is a table in `lifecycle.instances`; its rows are in
`infra.db.capacity`, its effects in `activities.capacity`, and the providers themselves in `providers`.
"""
