-- Notes attempts that have ended, so that their costs are added to the sums by day (`infra.db.costs`), and what they
-- held to the sums of lent machines (`infra.db.lent_machines`). Their allocations were released before them.
create function note_cost() returns trigger language plpgsql as $$
begin
    insert into cost_pending (workload, attempt) values (new.workload, new.attempt) on conflict do nothing;
    if new.launch_limit_s is not null then
        insert into given_pending (workload, attempt, machine, ended_at)
        select workload, attempt, machine, released_at from allocation
        where workload = new.workload and attempt = new.attempt and held_at is not null and released_at is not null
        on conflict do nothing;
    end if;
    return null;
end $$;
create trigger attempt_was_inserted_ended after insert on attempt for each row
    when (new.released_at is not null) execute function note_cost();
create trigger attempt_has_ended after update of released_at on attempt for each row
    when (old.released_at is null and new.released_at is not null) execute function note_cost();
