"""Ports of test servers."""

import socket

from launch_server import free_port


def test_a_free_port_is_below_those_of_clients_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as connection:
            first_client_port = min(address[1], connection.getsockname()[1])
            assert all(free_port() < first_client_port for _ in range(20))


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
