-- Notes attempts that have ended, so that their costs are added to the sums by day (`infra.db.costs`).
create function note_cost() returns trigger language plpgsql as $$
begin
    insert into cost_pending (workload, attempt) values (new.workload, new.attempt) on conflict do nothing;
    return null;
end $$;
create trigger attempt_was_inserted_ended after insert on attempt for each row
    when (new.released_at is not null) execute function note_cost();
create trigger attempt_has_ended after update of released_at on attempt for each row
    when (old.released_at is null and new.released_at is not null) execute function note_cost();
