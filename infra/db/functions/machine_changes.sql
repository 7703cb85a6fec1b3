-- Records the history of each machine's state, and of its cordons and drains: one row from each change on.
create function record_machine_change() returns trigger language plpgsql as $$
begin
    insert into machine_change (machine, since, state, is_closed)
    values (new.id, clock_timestamp(), new.state, new.cordon is not null or new.draining)
    on conflict (machine, since) do update set state = excluded.state, is_closed = excluded.is_closed;
    return null;
end $$;
create trigger machine_begins after insert on machine for each row execute function record_machine_change();
create trigger machine_has_another_state after update of state, cordon, draining on machine for each row
    when ((old.state, old.cordon is not null or old.draining)
          is distinct from (new.state, new.cordon is not null or new.draining))
    execute function record_machine_change();
