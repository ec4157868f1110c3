import socket

from launch_server import free_port


def test_a_free_port_is_none_that_a_clients_connection_may_take() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as connection:
            clients = min(address[1], connection.getsockname()[1])
            assert all(free_port() < clients for _ in range(20))


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
