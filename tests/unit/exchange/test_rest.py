"""What must hold for copies that a node makes to get back to the others: they become rare where
they do not help."""

from lowcomm_protocol.exchange.position import (
    COPY_COUNTS_SECONDS,
    FIRST_REST,
    LONGEST_REST,
    REST_SHARE,
    Rest,
)


def test_each_copy_of_a_day_doubles_the_rest_and_an_old_one_is_forgotten():
    rest, now = Rest(), 1000.0
    assert rest.left(now) == 0, "the first one begins at once"
    for wait in (FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST):
        rest.copied(0.1, now)
        assert rest.left(now) == wait
        assert rest.left(now + wait) == 0
        now += wait
    now += COPY_COUNTS_SECONDS
    rest.copied(0.1, now)
    assert rest.left(now) == FIRST_REST


def test_a_copy_that_takes_long_is_followed_by_a_longer_rest_within_a_bound():
    rest = Rest()
    rest.copied(60.0, 0.0)
    assert rest.left(0.0) == REST_SHARE * 60.0
    rest.copied(1e6, 0.0)
    assert rest.left(0.0) == LONGEST_REST


def test_a_peer_that_makes_us_copy_gets_ten_in_the_first_hour_and_one_an_hour_later():
    rest, now, copies = Rest(), 0.0, []
    while now < 3 * 24 * 3600:
        rest.copied(1.0, now)
        copies.append(now)
        now += max(1.0, rest.left(now))
    hours = [sum(hour <= copy / 3600 < hour + 1 for copy in copies) for hour in range(72)]
    assert hours[0] <= 10
    assert max(hours[1:]) <= 1
