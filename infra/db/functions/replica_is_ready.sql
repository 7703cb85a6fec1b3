-- Sets the time at which a replica becomes ready.
create or replace function replica_is_ready() returns trigger language plpgsql as $$
begin
    new.ready_at := clock_timestamp();
    return new;
end $$;
