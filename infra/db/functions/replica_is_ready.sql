-- How stale replicas are (MAST 3.5), kept whoever writes: `stale_since` is when the first partition was appended that a
-- replica of a whole table lacks, if it has been complete once; null where it lacks none, as the home.
create or replace function replica_is_ready() returns trigger language plpgsql as $$
begin
    new.ready_at := clock_timestamp();
    return new;
end $$;
